class current_platform:
    @staticmethod
    def is_cpu():
        return True
